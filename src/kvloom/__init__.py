"""kvloom: an LLM inference server, an elastic KV-cache pool and on-device sessions on one engine."""
