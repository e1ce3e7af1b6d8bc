"""The Communicator: the only thing that layers above know of communication."""
