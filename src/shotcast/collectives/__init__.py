"""The Communicator, which is all that the layers above know of communication."""
