"""The wire: generated messages, status codes and errors, and the client's channel."""
