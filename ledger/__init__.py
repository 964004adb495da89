"""The durable record in Redis: submit, follow, commit, lead."""
