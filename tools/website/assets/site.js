// code and tables that scroll sideways can be reached with the keyboard; the theme wraps tables after a page has loaded
const makeFocusable = () => {
  for (const each of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) each.tabIndex = 0;
};
document.addEventListener("DOMContentLoaded", () => {
  makeFocusable();
  new MutationObserver(makeFocusable).observe(document.body, { childList: true, subtree: true });
});

// a list of the versions that stand next to this one; another version opens at the same page if it has that page
const addVersions = () => {
  const base = new URL(JSON.parse(document.getElementById("__config").textContent).base + "/", location.href);
  const page = decodeURIComponent(location.pathname).slice(decodeURIComponent(base.pathname).length) || "index.html";
  const script = document.createElement("script");
  script.src = new URL("../versions.js", base);
  script.onload = () => {
    const choice = document.createElement("select");
    choice.className = "site-version";
    choice.ariaLabel = "Version";
    for (const { name } of window.siteVersions)
      choice.append(new Option(name, name, name === window.siteVersion, name === window.siteVersion));
    choice.onchange = () => {
      const { pages } = window.siteVersions.find(({ name }) => name === choice.value);
      location.href = new URL(`../${choice.value}/${pages.includes(page) ? page : "index.html"}`, base);
    };
    document.querySelector(".md-header__title").after(choice);
  };
  document.head.append(script);
};
if (window.siteVersion) document.addEventListener("DOMContentLoaded", addVersions);
