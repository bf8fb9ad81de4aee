"""The EMS service: node agent, peers, control plane. Of the SDK it uses the wire, the keys and the error codes only."""
