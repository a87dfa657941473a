// code and tables that scroll sideways can be reached with the keyboard; the theme wraps tables after a page has loaded
const makeFocusable = () => {
  for (const each of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) each.tabIndex = 0;
};
document.addEventListener("DOMContentLoaded", () => {
  makeFocusable();
  new MutationObserver(makeFocusable).observe(document.body, { childList: true, subtree: true });
});
