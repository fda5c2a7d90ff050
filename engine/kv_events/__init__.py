"""What the prefix cache holds, told to whoever routes requests among replicas (extra ``kv-events``)."""
