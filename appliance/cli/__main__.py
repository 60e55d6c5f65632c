"""``python -m appliance.cli``: the agent starts itself again this way with a clean environment."""

from appliance.cli import main

main()
