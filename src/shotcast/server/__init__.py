"""An HTTP server with OpenAI's API for the engine."""

from shotcast import extras

extras.require("server", "shotcast.server")
