'use strict';
// Plots of metrics: several runs over one another, smoothed, on linear or logarithmic axes, with one range for all.
(() => {
  const { html, useState, useEffect, useRef, useMemo } = RlView;

  // An exponential mean that begins without bias: the weights of the points seen so far add up to one.
  RlView.smoothed = (values, weight) => {
    if (!(weight > 0)) return values;
    let mean = 0;
    let total = 0;
    return values.map((value) => {
      mean = weight * mean + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return mean / total;
    });
  };

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const faint = (color) => `${color}40`;
  const cursor = uPlot.sync('rl-view');
  // distances between the ticks of steps, of which there are no halves
  const WHOLE = Array.from({ length: 30 }, (_, place) => [1, 2, 5][place % 3] * 10 ** Math.floor(place / 3));

  // lines: [{ label, color, x, y }]
  RlView.Plot = ({ lines, by, isLog, smoothing, low, high, onRange, height = 190, theme }) => {
    const frame = useRef(null);
    const plot = useRef(null);
    const data = useMemo(() => {
      const usable = lines.filter((line) => line.x.length);
      if (!usable.length) return null;
      const tables = usable.map((line) => {
        const y = isLog ? line.y.map((value) => (value > 0 ? value : null)) : line.y;
        return smoothing > 0 ? [line.x, RlView.smoothed(line.y, smoothing).map((value) => (isLog && !(value > 0) ? null : value)), y] : [line.x, y];
      });
      return { usable, aligned: tables.length > 1 ? uPlot.join(tables) : tables[0] };
    }, [lines, isLog, smoothing]);
    useEffect(() => {
      if (!data) return undefined;
      const width = frame.current.clientWidth || 400;
      const axis = { stroke: style('--muted'), grid: { stroke: style('--line'), width: 1 }, ticks: { show: false }, font: '11px system-ui, sans-serif' };
      const series = [{ label: by }];
      for (const line of data.usable) {
        const isSingle = line.x.length < 60;
        series.push({ label: line.label, stroke: line.color, width: 1.5, spanGaps: true, points: { show: isSingle && line.x.length < 3, size: 5 }, value: (_, value) => RlView.number(value) });
        if (smoothing > 0) series.push({ label: `${line.label} raw`, stroke: faint(line.color), width: 1, spanGaps: true, points: { show: false }, class: 'raw' });
      }
      const xValues = (_, ticks) => ticks.map((value) => (value === null ? '' : by === 'time' ? RlView.duration(value) : value >= 1e4 ? Intl.NumberFormat('en', { notation: 'compact' }).format(value) : RlView.number(value)));
      plot.current = new uPlot({
        width, height, series,
        legend: { show: false },
        cursor: { sync: { key: cursor.key, setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
        scales: {
          x: { time: false, range: (_, min, max) => (data.aligned[0].length > 1 ? [low ?? min, high ?? max] : [data.aligned[0][0] - 1, data.aligned[0][0] + 1]) },
          y: isLog ? { distr: 3 } : {},
        },
        axes: [{ ...axis, size: 26, values: xValues, space: 60, ...(by === 'step' ? { incrs: WHOLE } : {}) }, { ...axis, size: 54, values: (_, ticks) => ticks.map((value) => RlView.number(value)) }],
        hooks: {
          setSelect: [(self) => {
            if (self.select.width < 4) return;
            onRange?.(self.posToVal(self.select.left, 'x'), self.posToVal(self.select.left + self.select.width, 'x'));
            self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          }],
          setCursor: [(self) => frame.current?.dispatchEvent(new CustomEvent('plot-cursor', { detail: self.cursor.idx }))],
        },
      }, data.aligned, frame.current);
      const resize = new ResizeObserver(([entry]) => entry.contentRect.width > 0 && plot.current.setSize({ width: entry.contentRect.width, height }));
      resize.observe(frame.current);
      return () => { resize.disconnect(); plot.current.destroy(); };
    }, [data, by, isLog, smoothing, low, high, height, theme]);
    const [at, setAt] = useState(null);
    useEffect(() => {
      const follow = (event) => setAt(event.detail ?? null);
      frame.current?.addEventListener('plot-cursor', follow);
      return () => frame.current?.removeEventListener('plot-cursor', follow);
    }, [data]);
    if (!data) return html`<p class="empty">no values yet</p>`;
    const stride = smoothing > 0 ? 2 : 1;
    const valueAt = (line) => {
      const column = data.aligned[1 + stride * line];
      if (at === null) return column.findLast((value) => value !== null && value !== undefined);
      for (let index = at; index >= 0; index -= 1) if (column[index] !== null && column[index] !== undefined) return column[index];
      return null;
    };
    const place = at === null ? '' : by === 'time' ? RlView.duration(data.aligned[0][at]) : `${by} ${RlView.number(data.aligned[0][at])}`;
    return html`<div class="plot" ref=${frame} onDblClick=${() => onRange?.(null, null)}></div>
      <ul class="values">${data.usable.map((line, index) => html`<li><i style=${{ background: line.color }}></i>${data.usable.length > 1 && html`<span>${line.label}</span>`}<b>${RlView.number(valueAt(index))}</b></li>`)}${place && html`<li class="muted">${place}</li>`}</ul>`;
  };

  // The plot of one metric of some runs. It asks for its points when it comes into view.
  RlView.Chart = ({ name, runs: all, query, theme, onRange, height }) => {
    const frame = useRef(null);
    const [isSeen, setSeen] = useState(false);
    const [lines, setLines] = useState(null);
    const [problem, setProblem] = useState(null);
    const by = query.get('x') ?? 'step';
    const runs = all.filter((run) => !run.names || run.names.has(name));
    const live = RlView.useLive();
    const version = runs.map((run) => `${run.id}=${live.of(run.id)}`).join(' ');
    useEffect(() => {
      const observer = new IntersectionObserver(([entry]) => entry.isIntersecting && setSeen(true), { rootMargin: '300px' });
      observer.observe(frame.current);
      return () => observer.disconnect();
    }, []);
    useEffect(() => {
      if (!isSeen) return undefined;
      const stop = new AbortController();
      Promise.all(runs.map((run) => RlView.ask('series', { id: run.id, by, name }, stop.signal).then((answer) => ({ label: run.label ?? run.id, color: run.color, ...answer.series[name] })))).then(
        (found) => { if (!stop.signal.aborted) { setLines(found); setProblem(null); } },
        (error) => { if (!stop.signal.aborted) setProblem(error.message); },
      );
      return () => stop.abort();
    }, [isSeen, name, by, version, runs.map((run) => run.color).join()]);
    const range = (key) => (query.get(key) === null ? null : Number(query.get(key)));
    return html`<figure class="chart" ref=${frame} data-metric=${name}>
      <figcaption>${name}</figcaption>
      ${problem ? html`<${RlView.Problem} text=${problem} />` : lines === null ? html`<div class="plot-space"></div>` : html`<${RlView.Plot} lines=${lines} by=${by} isLog=${query.get('log') === '1'} smoothing=${Number(query.get('smooth') ?? 0)} low=${range('low')} high=${range('high')} theme=${theme} height=${height}
        onRange=${onRange ?? ((low, high) => RlView.setQuery({ low: low === null ? '' : Number(low.toPrecision(6)), high: high === null ? '' : Number(high.toPrecision(6)) }))} />`}
    </figure>`;
  };

  RlView.ChartControls = ({ query }) => html`<div class="controls" role="group" aria-label="axes">
    <${RlView.Choice} label="x axis" name="x" query=${query} fallback="step" options=${['step', 'time', 'tokens']} />
    <${RlView.Field} label=${`smoothing ${query.get('smooth') ?? 0}`}>
      <input type="range" min="0" max="0.99" step="0.01" value=${query.get('smooth') ?? 0} onInput=${(event) => RlView.setQuery({ smooth: Number(event.currentTarget.value) || '' })} />
    </${RlView.Field}>
    <${RlView.Toggle} label="log scale" name="log" query=${query} />
    ${(query.get('low') !== null || query.get('high') !== null) && html`<button class="quiet" onClick=${() => RlView.setQuery({ low: '', high: '' })}>reset range</button>`}
  </div>`;

  // All metrics of some runs by group; the headlines are first, and the others open on request or by a search.
  RlView.Charts = ({ runs, names, headlines, query, theme }) => {
    const search = (query.get('metric') ?? '').toLowerCase();
    const opened = query.getAll('open');
    const found = search ? names.filter((name) => name.toLowerCase().includes(search)) : [];
    const groups = useMemo(() => {
      const map = new Map();
      for (const name of names) {
        const group = name.includes('/') ? name.split('/')[0] : 'other';
        map.set(group, [...(map.get(group) ?? []), name]);
      }
      return [...map].sort(([one], [other]) => one.localeCompare(other));
    }, [names.join()]);
    const grid = (list) => html`<div class="charts">${list.map((name) => html`<${RlView.Chart} key=${name} name=${name} runs=${runs} query=${query} theme=${theme} />`)}</div>`;
    const toggle = (group) => RlView.setQuery({ open: opened.includes(group) ? opened.filter((each) => each !== group) : [...opened, group] });
    return html`<section class="panel">
      <div class="bar"><${RlView.TextField} label="find a metric" name="metric" query=${query} placeholder="reward, kl, time/…" /><${RlView.ChartControls} query=${query} /></div>
      ${search ? (found.length ? grid(found.slice(0, 60)) : html`<${RlView.Empty}>No metric contains “${search}”.</${RlView.Empty}>`) : html`
        ${grid(headlines)}
        ${groups.map(([group, list]) => html`<section class="group">
          <h3><button class="disclosure" aria-expanded=${String(opened.includes(group))} onClick=${() => toggle(group)}>${group}<span class="muted"> ${list.length}</span></button></h3>
          ${opened.includes(group) && grid(list)}
        </section>`)}`}
    </section>`;
  };
})();
