"""Text-to-image models in the server: their settings, and the service that runs requests on one."""
