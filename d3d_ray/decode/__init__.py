"""The decode loops, without Ray: sessions, modes, draft plans and the scheduler over them."""
