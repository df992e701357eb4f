"""Tasks, and rewards that are computed in processes of their own."""
