"""An HTTP server for the engine, with OpenAI's API."""

from shotcast import extras

extras.require("server", "shotcast.server")
