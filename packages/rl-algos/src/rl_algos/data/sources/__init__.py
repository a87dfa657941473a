"""Where rows come from: files, object stores, the hub, and generated datasets."""
