"""What several of the rooms with loops use: helpers for asyncio tasks."""
