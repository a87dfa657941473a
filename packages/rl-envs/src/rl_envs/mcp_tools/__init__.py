"""The environment `mcp_tools`: the tools of an MCP server, and an answer that is compared with the row's."""
