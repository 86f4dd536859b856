"""An OpenAI-compatible server seen from the caller's side; what `flyball bench` and `flyball chat` share."""
