"""Text-to-image models as the server has them: their settings, and the service that runs requests on one."""
