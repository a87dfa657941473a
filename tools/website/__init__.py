"""The documentation site: pages of the checkout, generated reference pages, and the build with Zensical."""
