"""The gateway: agents call it as a chat API, and it records their episodes."""
