"""Environment factories and the lock-step groups that executors drive; numpy only."""
