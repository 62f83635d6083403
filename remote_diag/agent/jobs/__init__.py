"""Jobs: long runs that outlive the client, the agent and the connection that started them."""
