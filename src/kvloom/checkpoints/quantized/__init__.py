"""Quantised weights as files hold them: blocks of GGUF, folders of AWQ, GPTQ and compressed-tensors."""
