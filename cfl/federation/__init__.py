"""Clients, server, the channel between them, and what clients keep from round to round."""
