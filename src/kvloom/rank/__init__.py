"""The rank process, which holds weights and KV cache: loading, running steps, sampling."""
