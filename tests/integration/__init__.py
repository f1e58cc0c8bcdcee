"""Real workers, brokers and stores, and the faults they must survive."""
