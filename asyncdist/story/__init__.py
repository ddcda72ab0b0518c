"""What the ranks of a job do right now: as data, asked for over sockets of this host, and told on one screen."""
