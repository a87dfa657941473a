'use strict';
// Routes in the address, requests and their answers, live changes, and how numbers are written.
const RlView = (globalThis.RlView = {});
(() => {
  const { h, html, render, useState, useEffect, useRef, useMemo, useCallback } = globalThis.htmPreact;
  Object.assign(RlView, { h, html, render, useState, useEffect, useRef, useMemo, useCallback });

  // The address: #/runs?x=step or #/run/ID/rollouts?step=3. Everything that a page shows follows from it.
  RlView.readRoute = () => {
    const [path, query = ''] = location.hash.replace(/^#\/?/, '').split('?');
    const parts = path.split('/').filter(Boolean).map(decodeURIComponent);
    return { parts: parts.length ? parts : ['runs'], query: new URLSearchParams(query) };
  };
  RlView.address = (parts, query = {}) => {
    const given = Object.entries(query).filter(([, value]) => value !== '' && value !== null && value !== undefined && value !== false);
    const text = new URLSearchParams(given.flatMap(([name, value]) => (Array.isArray(value) ? value.map((each) => [name, each]) : [[name, value]])));
    return `#/${parts.map(encodeURIComponent).join('/')}${given.length ? `?${text}` : ''}`;
  };
  RlView.useRoute = () => {
    const [route, setRoute] = useState(RlView.readRoute);
    useEffect(() => {
      const change = () => setRoute(RlView.readRoute());
      addEventListener('hashchange', change);
      return () => removeEventListener('hashchange', change);
    }, []);
    return route;
  };
  // Change parts of the query and keep the rest. Filters replace the entry of the history, so that "back" leaves the page.
  RlView.setQuery = (changes, { push = false } = {}) => {
    const { parts, query } = RlView.readRoute();
    for (const [name, value] of Object.entries(changes)) {
      query.delete(name);
      for (const each of Array.isArray(value) ? value : [value]) {
        if (each !== '' && each !== null && each !== undefined && each !== false) query.append(name, each);
      }
    }
    const text = query.toString();
    const target = `#/${parts.map(encodeURIComponent).join('/')}${text ? `?${text}` : ''}`;
    if (push) location.hash = target;
    else {
      history.replaceState(null, '', target);
      dispatchEvent(new HashChangeEvent('hashchange'));
    }
  };

  // Answers: from the server, or from the scripts of an export, which a page in a file can load and cannot fetch.
  const exported = globalThis.RlViewExport;
  RlView.isExport = Boolean(exported);
  const arrived = new Map();
  if (exported) exported.receive = (name, answer) => arrived.get(name)?.resolve(answer);
  const keyOf = (name, given) => JSON.stringify([name, Object.keys(given).sort().map((each) => [each, String(given[each])])]);
  const fromExport = (name, given) => {
    const file = exported.names[keyOf(name, given)];
    if (!file) return Promise.reject(new Error('This is not part of the export. Open the run with rl view.'));
    if (!arrived.has(file)) {
      const waiting = {};
      waiting.promise = new Promise((resolve, reject) => Object.assign(waiting, { resolve, reject }));
      arrived.set(file, waiting);
      const script = document.createElement('script');
      script.src = `data/${file}.js`;
      script.onerror = () => waiting.reject(new Error(`data/${file}.js cannot be read.`));
      document.head.append(script);
    }
    return arrived.get(file).promise;
  };
  RlView.ask = async (name, given = {}, signal = undefined) => {
    const params = Object.fromEntries(Object.entries(given).filter(([, value]) => value !== '' && value !== undefined && value !== null));
    if (exported) return fromExport(name, params);
    const pairs = Object.entries(params).flatMap(([key, value]) => (Array.isArray(value) ? value.map((each) => [key, each]) : [[key, value]]));
    const response = await fetch(`api/${name}?${new URLSearchParams(pairs)}`, { signal });
    if (!response.ok) throw new Error((await response.text()).trim() || `the server answered ${response.status}`);
    return response.json();
  };
  // The answer of a request; the last one is kept while the next is awaited. `version` asks again.
  RlView.useAnswer = (name, given, version = 0) => {
    const [state, setState] = useState({ answer: null, problem: null, key: null });
    const key = given === null ? null : keyOf(name, given);
    useEffect(() => {
      if (key === null) return undefined;
      const stop = new AbortController();
      RlView.ask(name, given, stop.signal).then(
        (answer) => { if (!stop.signal.aborted) setState({ answer, problem: null, key }); },
        (error) => { if (!stop.signal.aborted) setState((last) => ({ answer: last.key === key ? last.answer : null, problem: error.message, key })); },
      );
      return () => stop.abort();
    }, [key, version]);
    return { answer: state.answer, problem: state.problem, isStale: state.key !== key };
  };

  // Changes of files, as the server reports them: a number per entry that grows.
  const watchers = new Set();
  const versions = new Map();
  let listVersion = 0;
  let isConnected = !exported;
  const tell = () => watchers.forEach((watcher) => watcher());
  if (!exported) {
    const events = new EventSource('api/events');
    events.onmessage = (event) => {
      const { changed, list } = JSON.parse(event.data);
      for (const id of Object.keys(changed)) versions.set(id, (versions.get(id) ?? 0) + 1);
      if (list || Object.keys(changed).length) listVersion += 1;
      tell();
    };
    events.onopen = () => {
      // what changed meanwhile is not reported again
      if (!isConnected) for (const id of versions.keys()) versions.set(id, versions.get(id) + 1);
      if (!isConnected) listVersion += 1;
      isConnected = true;
      tell();
    };
    events.onerror = () => { isConnected = false; tell(); };
  }
  RlView.useLive = () => {
    const [, setCount] = useState(0);
    useEffect(() => {
      const watcher = () => setCount((count) => count + 1);
      watchers.add(watcher);
      return () => watchers.delete(watcher);
    }, []);
    return { list: listVersion, of: (id) => versions.get(id) ?? 0, isConnected };
  };

  // Numbers, times and sizes.
  RlView.number = (value) => {
    if (value === null || value === undefined || value === '') return '';
    if (typeof value !== 'number') return String(value);
    if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
    const size = Math.abs(value);
    if (size >= 1e7 || (size < 1e-4 && size > 0)) return value.toExponential(2).replace('e+', 'e');
    return String(Number(value.toPrecision(4)));
  };
  RlView.shown = (value) => (value === null || value === undefined ? '' : typeof value === 'number' ? RlView.number(value) : typeof value === 'string' ? value : JSON.stringify(value));
  RlView.duration = (seconds) => {
    if (!(seconds >= 0)) return '';
    if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
    if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
    if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
    return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
  };
  RlView.age = (time) => {
    const seconds = (Date.now() - new Date(time).getTime()) / 1000;
    for (const [size, unit] of [[86400, 'd'], [3600, 'h'], [60, 'min']]) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
    return 'now';
  };
  RlView.bytes = (count) => {
    for (const [size, unit] of [[2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']]) if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
    return `${count} B`;
  };
  RlView.shortModel = (name) => String(name ?? '').replace(/\/+$/, '').replace(/^.*\/([^/]+)\/checkpoints\/(step_\d+)\/hf$/, '$1/$2').split('/').slice(-2).join('/');
  RlView.COLORS = ['#2f6fde', '#d9822b', '#2a9d63', '#c23b52', '#8257c9', '#1d9aaa', '#b0892a', '#d0569e', '#5f7383', '#7aa11f'];
})();
