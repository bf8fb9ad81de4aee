"""The process that looks at model files, so that a hostile one harms nobody else."""
