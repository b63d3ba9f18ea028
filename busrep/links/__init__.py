"""Links carry messages between processes: Redis pub/sub, and TCP between a server and its clients."""
