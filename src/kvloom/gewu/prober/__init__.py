"""The process that examines model files, so that a hostile file harms nobody else."""
