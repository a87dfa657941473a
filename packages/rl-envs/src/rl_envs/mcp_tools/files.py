"""An MCP server whose files are the facts of `calculations`: each is the name of a file that contains its number.

The tool is the same as in `@modelcontextprotocol/server-filesystem`, so that a policy may call either.
"""

from mcp.server import MCPServer

from rl_envs.calculations import facts

NUMBERS = {each["title"]: each["text"] for each in facts()}

server = MCPServer("files")


@server.tool()
def read_text_file(path: str) -> str:
    """Read a file as text."""
    if path not in NUMBERS:
        raise ValueError(f"there is no file {path}")
    return NUMBERS[path]


if __name__ == "__main__":
    server.run()
