// the version of a site that stands next to those of other versions; tools/website/versions.py sets it
window.siteVersion = "";
