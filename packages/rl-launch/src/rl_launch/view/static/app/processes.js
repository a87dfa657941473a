'use strict';
// The traces of a run: rows of processes over all steps, and over one step; and its profiles.
(() => {
  const { html, useState } = RlView;
  const HEIGHT = 18;
  // Work of a process has the colour of the phase that it belongs to.
  const PHASE_OF = { train_step: 'training', infer: 'logprobs', send: 'weight_sync', transfer: 'weight_sync', rollouts: 'data', turns: 'evaluation' };
  const color = (name) => {
    const phase = RlView.PHASE_COLORS[PHASE_OF[name] ?? name] ?? (/version \d/.test(name) ? RlView.PHASE_COLORS.weight_sync : null);
    if (phase) return phase;
    let sum = 0;
    for (const character of name.replace(/\d+/g, '')) sum = (sum * 31 + character.charCodeAt(0)) % 9973;
    return RlView.COLORS[sum % RlView.COLORS.length];
  };
  const percent = (share) => `${Math.round(100 * Math.min(1, Math.max(0, share)))}%`;
  // The process is named in the first of its rows only.
  const Head = ({ rows, index }) => {
    const isFirst = index === 0 || rows[index - 1].process !== rows[index].process;
    return html`<th scope="row" class=${isFirst ? 'first' : ''}>${isFirst ? rows[index].process : html`<span class="visually-hidden">${rows[index].process}</span>`} <span class="muted">${rows[index].track}</span></th>`;
  };

  RlView.Processes = ({ id, query, version }) => {
    const { answer, problem } = RlView.useAnswer('processes', { id }, version);
    if (problem && !answer) return html`<section class="panel"><${RlView.Problem} text=${problem} /></section>`;
    if (!answer) return html`<section class="panel"><${RlView.Empty}>Reading traces…</${RlView.Empty}></section>`;
    return html`${answer.last === null
      ? html`<section class="panel"><h2>Processes</h2><${RlView.Empty}>This run has no traces (profiling.traces).</${RlView.Empty}></section>`
      : html`<${Step} id=${id} query=${query} version=${version} first=${answer.first} last=${answer.last} /><${Whole} answer=${answer} />`}
      <${Profiles} id=${id} version=${version} />`;
  };

  const Step = ({ id, query, version, first, last }) => {
    const steps = RlView.isExport ? (globalThis.RlViewExport.steps[id]?.spans ?? []) : [];
    const step = Number(query.get('trace') || (RlView.isExport ? (steps.at(-1) ?? last) : last));
    const { answer, problem } = RlView.useAnswer('spans', { id, step }, version);
    const go = (next) => RlView.setQuery({ trace: next });
    return html`<section class="panel processes"><h2>Processes in step ${step} ${answer && html`<span class="muted">${RlView.duration(answer.seconds)}</span>`}</h2>
      <div class="bar">${RlView.isExport
        ? html`<${RlView.Choice} label="step" name="trace" query=${query} fallback=${String(step)} options=${steps.map(String)} />`
        : html`<div class="steps" role="group" aria-label="step of the trace"><button aria-label="earlier traced step" disabled=${step <= first} onClick=${() => go(step - 1)}>‹</button>
          <${RlView.TextField} label="traced step" name="trace" type="number" query=${query} placeholder=${String(last)} />
          <button aria-label="later traced step" disabled=${step >= last} onClick=${() => go(step + 1)}>›</button>
          ${query.get('trace') !== null && html`<button class="quiet" onClick=${() => go('')}>newest</button>`}</div>`}</div>
      ${problem && html`<${RlView.Problem} text=${problem} />`}
      ${answer && html`<${Rows} answer=${answer} />`}</section>`;
  };

  const Rows = ({ answer }) => {
    const [chosen, setChosen] = useState('');
    const { rows, seconds, marks } = answer;
    const at = (time) => (1000 * time) / seconds;
    return html`<div class="table-frame" tabindex="0" role="region" aria-label="processes of the step"><table class="lanes"><thead><tr><th scope="col">process</th><th scope="col">${`0 to ${RlView.duration(seconds)}`}</th><th scope="col" class="number">idle</th></tr></thead>
      <tbody>${marks.length > 0 && html`<tr><th scope="row" class="first">restarts</th><td class="track"><svg viewBox=${`0 0 1000 ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label="restarts">${marks.map((mark) => html`<rect class="mark" x=${at(mark.at) - 2} width="4" y="0" height=${HEIGHT}><title>${mark.text}</title></rect>`)}</svg></td><td></td></tr>`}
      ${rows.map((row, index) => html`<tr><${Head} rows=${rows} index=${index} /><td class="track"><svg viewBox=${`0 0 1000 ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`${row.process} ${row.track}: ${row.spans.length} spans, idle ${percent(row.idle)}`} onClick=${(event) => setChosen(event.target.querySelector?.('title')?.textContent ?? '')}>
        ${row.spans.map(([begin, took, name, count, depth]) => html`<rect x=${at(begin)} width=${Math.max(1, at(took))} y=${Math.min(depth, 3) * 4} height=${HEIGHT - Math.min(depth, 3) * 4} style=${{ fill: color(name) }}><title>${`${name}: ${RlView.duration(took)}${count > 1 ? `, ${count} together` : ''}, from ${RlView.duration(begin)}`}</title></rect>`)}</svg></td><td class="number">${percent(row.idle)}</td></tr>`)}</tbody></table></div>
      <p class="muted" role="status">${chosen || 'Point at a span, or choose it, for its name and duration. Idle is the share of the step in which a row does nothing.'}</p>`;
  };

  const Whole = ({ answer }) => {
    const { ranges, rows } = answer;
    const label = ([first, last]) => `steps ${first} to ${last}`;
    return html`<section class="panel processes"><h2>Processes in all steps <span class="muted">busy share by ${ranges.length ? ranges[0][1] - ranges[0][0] + 1 : 20} steps</span></h2>
      <div class="table-frame" tabindex="0" role="region" aria-label="processes of the run"><table class="lanes"><thead><tr><th scope="col">process</th><th scope="col">${ranges.length > 0 && `step ${ranges[0][0]} to ${ranges.at(-1)[1]}`}</th><th scope="col" class="number">idle</th></tr></thead>
      <tbody>${rows.map((row, index) => html`<tr><${Head} rows=${rows} index=${index} /><td class="track"><svg viewBox=${`0 0 ${ranges.length} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`${row.process} ${row.track}: busy share by range of steps`}>${row.busy.map((share, at) => share > 0 && html`<rect x=${at} width="0.92" y=${HEIGHT * (1 - share)} height=${HEIGHT * share}><title>${`${label(ranges[at])}: busy ${percent(share)}`}</title></rect>`)}</svg></td><td class="number">${percent(1 - row.share)}</td></tr>`)}</tbody></table></div>
      <p class="muted">Traces for ui.perfetto.dev: ${answer.files.map((file) => html`<code>${file.path}</code> `)}</p></section>`;
  };

  const Profiles = ({ id, version }) => {
    const { answer } = RlView.useAnswer('profiles', { id }, version);
    if (!answer?.profiles.length) return null;
    return html`<section class="panel"><h2>Profiles</h2><div class="table-frame" tabindex="0" role="region" aria-label="profiles"><table><thead><tr><th scope="col">steps</th><th scope="col">worker</th><th scope="col">tool</th><th scope="col">how to open it</th><th scope="col" class="number">size</th><th scope="col">file</th></tr></thead>
      <tbody>${answer.profiles.map((each) => html`<tr><td class="id">${each.first} to ${each.last}</td><td class="id">${each.worker}</td><td>${each.tool}</td><td class="wrap">${each.how}</td><td class="number">${RlView.bytes(each.bytes)}</td><td class="wrap code">${each.path}</td></tr>`)}</tbody></table></div></section>`;
  };
})();
