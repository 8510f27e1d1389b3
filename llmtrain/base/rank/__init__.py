"""The parts of launch and watch that a rank uses: heartbeat, messages, faults, network interface. No torch."""
