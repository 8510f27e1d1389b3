"""How the hosts of a job are named and reached, and which environment arrives there."""
