'use strict';
// The frame of all pages: the bar at the top, the theme, keys, and the page of the address.
(() => {
  const { html, render, useState, useEffect } = RlView;
  const THEMES = ['system', 'light', 'dark'];
  const remembered = () => { try { return localStorage.getItem('rl-view-theme') ?? 'system'; } catch { return 'system'; } };

  const App = () => {
    const route = RlView.useRoute();
    const live = RlView.useLive();
    const [theme, setTheme] = useState(remembered);
    const [isHelpOpen, setHelpOpen] = useState(false);
    useEffect(() => {
      document.documentElement.dataset.theme = theme;
      try { localStorage.setItem('rl-view-theme', theme); } catch { /* a page in a file may have no storage */ }
    }, [theme]);
    const [page, id, tab] = route.parts;
    useEffect(() => { document.title = `${page === 'run' ? `${id} ${tab ?? ''}` : page} · rl view`; }, [page, id, tab]);
    useEffect(() => {
      const key = (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.('input, select, textarea')) return;
        const target = { g: '#/runs', e: '#/evaluations', s: '#/servers' }[event.key];
        const tabs = { m: 'metrics', r: 'rollouts', t: 'timeline', a: 'advice', c: 'config', l: 'logs', p: 'checkpoints' };
        if (target) location.hash = target;
        else if (page === 'run' && tabs[event.key]) location.hash = RlView.address(['run', id, tabs[event.key]]);
        else if (event.key === '/') { event.preventDefault(); document.querySelector('main input[type=text], main input:not([type])')?.focus(); }
        else if (event.key === '?') setHelpOpen((isOpen) => !isOpen);
        else if (event.key === 'Escape') { setHelpOpen(false); if (RlView.readRoute().query.get('open') && tab === 'rollouts') RlView.closeRollout(); }
      };
      addEventListener('keydown', key);
      return () => removeEventListener('keydown', key);
    }, [page, id, tab]);
    const body = page === 'run' ? html`<${RlView.RunPage} key=${id} id=${id} tab=${tab ?? 'metrics'} query=${route.query} theme=${theme} />`
      : page === 'evaluations' ? html`<${RlView.EvaluationsPage} query=${route.query} />`
      : page === 'servers' ? html`<${RlView.ServersPage} query=${route.query} />`
      : html`<${RlView.RunsPage} query=${route.query} theme=${theme} />`;
    return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById('main').focus(); }}>skip to the content</a>
      <header class="top"><a class="brand" href="#/runs"><img src="icon.svg" alt="" width="18" height="18" />rl view</a>
        <nav aria-label="pages"><a href="#/runs" aria-current=${page === 'runs' ? 'page' : undefined}>runs</a><a href="#/evaluations" aria-current=${page === 'evaluations' ? 'page' : undefined}>evaluations</a><a href="#/servers" aria-current=${page === 'servers' ? 'page' : undefined}>servers</a></nav>
        <span class="grow"></span>
        ${RlView.isExport ? html`<span class="live">exported</span>` : html`<span class=${`live ${live.isConnected ? 'on' : 'off'}`} role="status">${live.isConnected ? 'live' : 'no connection'}</span>`}
        <button class="quiet" onClick=${() => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % 3])} aria-label=${`colours: ${theme}`}>${{ system: '◐', light: '☀', dark: '☾' }[theme]}</button>
        <button class="quiet" onClick=${() => setHelpOpen(!isHelpOpen)} aria-expanded=${String(isHelpOpen)} aria-label="keys">?</button></header>
      ${isHelpOpen && html`<aside class="help panel" aria-label="keys"><dl>${[['g', 'runs'], ['e', 'evaluations'], ['s', 'servers'], ['m r t a c l p', 'metrics, rollouts, timeline, advice, config, logs, checkpoints of a run'], ['/', 'first search field'], ['↑ ↓ or j k, Enter', 'rows of a table'], ['Esc', 'close a rollout'], ['drag, double click', 'zoom all plots, reset']].map(([keys, what]) => html`<div><dt><kbd>${keys}</kbd></dt><dd>${what}</dd></div>`)}</dl></aside>`}
      <main id="main" tabindex="-1">${body}</main>`;
  };
  render(html`<${App} />`, document.getElementById('app'));
})();
