"""What averaging is worth: tasks, settings and methods of the benchmark ``value``."""
