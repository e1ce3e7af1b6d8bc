"""The Communicator, the only interface to communication for the layers above."""
