#!/usr/bin/env bash
# Build the documentation site and push it to the branch gh-pages, next to the other versions that the branch has.
#   tools/publish_site.sh REMOTE VERSION      # VERSION: latest, or that of a release
set -euo pipefail
cd "$(dirname "$0")/.."
# a tag is rl-launch-v0.2.1
remote=$1 version=${2#rl-launch-v}
pages=$(mktemp -d)
trap 'rm -rf "$pages"' EXIT
if git ls-remote --exit-code --heads "$remote" gh-pages > /dev/null; then
    git clone --quiet --depth 1 --branch gh-pages "$remote" "$pages"
else
    git init --quiet --initial-branch gh-pages "$pages"
    git -C "$pages" remote add origin "$remote"
fi
uv run --group site tools/build_site.py --publish "$pages" --version "$version"
touch "$pages/.nojekyll"
git -C "$pages" add --all
if git -C "$pages" diff --cached --quiet; then
    echo "the site of $version has not changed"
    exit
fi
git -C "$pages" -c user.name=site -c user.email=site@localhost commit --quiet --message "Site of $version"
git -C "$pages" push --quiet origin gh-pages
