"""What a rank needs of a launch and of its watch: heartbeat, messages, faults, network interface. No torch."""
