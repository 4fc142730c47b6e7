"""What ``proxykv`` can do, a file for each command; see `cli`."""
