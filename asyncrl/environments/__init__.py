"""Tasks and rewards, scored in processes of their own."""
