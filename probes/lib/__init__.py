"""What several probes share; travels to the host with the agent. Imported inside of ``run``, never at module level."""
