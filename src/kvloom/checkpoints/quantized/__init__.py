"""Formats of quantised weights in files: blocks of GGUF, folders of AWQ, GPTQ and compressed-tensors."""
