"""The machinery under `launch`: processes, their life and death, and what is said of them."""
