'use strict';
// Evaluations and their comparison, and servers of training steps with their tenants.
(() => {
  const { html } = RlView;
  const interval = (estimate) => (estimate ? html`<b>${RlView.number(estimate.value)}</b> <span class="muted">${RlView.number(estimate.low)} to ${RlView.number(estimate.high)}</span>` : '');

  RlView.EvaluationsPage = ({ query }) => {
    const live = RlView.useLive();
    const first = query.get('first') ?? '';
    const second = query.get('second') ?? '';
    const both = first && second && first !== second;
    const { answer, problem } = RlView.useAnswer('evaluations', both ? { first, second } : {}, live.list);
    if (problem && !answer) return html`<${RlView.Problem} text=${problem} />`;
    if (!answer) return html`<${RlView.Empty}>Reading evaluations…</${RlView.Empty}>`;
    if (!answer.evaluations.length) return html`<section class="panel"><${RlView.Empty}>There are no evaluations in this folder. rl eval makes them; pass their folders to rl view.</${RlView.Empty}></section>`;
    const tasks = [...new Set(answer.evaluations.flatMap((each) => Object.keys(each.tasks)))];
    const columns = [
      { name: 'id', title: 'evaluation', className: 'name', cell: (each) => html`<a href=${RlView.address(['run', each.id, 'rollouts'], { kind: 'evaluation' })}>${each.id}</a>`, value: (each) => each.id },
      { name: 'model', title: 'model', cell: (each) => html`<span title=${each.model}>${RlView.shortModel(each.model)}</span>`, value: (each) => each.model },
      ...tasks.map((task) => ({ name: task, title: task, isNumber: true, value: (each) => each.tasks[task]?.estimates.mean?.value, cell: (each) => (each.tasks[task] ? html`${interval(each.tasks[task].estimates.mean)}` : '') })),
      { name: 'details', title: 'pass@k, cons@k, failures', canSort: false, className: 'wrap', cell: (each) => (each.problem ? html`<span class="warn">${each.problem}</span>` : Object.entries(each.tasks).map(([task, summary]) => html`<div class="muted">${tasks.length > 1 ? `${task}: ` : ''}${Object.entries(summary.estimates).filter(([name]) => name !== 'mean').map(([name, estimate]) => `${name} ${RlView.number(estimate.value)}`).join(', ')}${summary.num_failed ? `, ${summary.num_failed} failed` : ''} <span>${summary.num_prompts} prompts</span></div>`)) },
    ];
    const sort = query.get('sort') ?? '';
    const options = answer.evaluations.filter((each) => !each.problem).map((each) => each.id);
    return html`<section class="panel"><${RlView.Table} label="evaluations" columns=${columns} rows=${RlView.sorted(answer.evaluations, columns, sort)} sort=${sort} onSort=${(next) => RlView.setQuery({ sort: next })} keyOf=${(each) => each.id} /></section>
      ${options.length > 1 && !RlView.isExport && html`<section class="panel"><h2>Comparison <span class="muted">on the prompts that two evaluations share</span></h2>
        <div class="bar"><${RlView.Choice} label="first" name="first" query=${query} all="choose" options=${options} /><${RlView.Choice} label="second" name="second" query=${query} all="choose" options=${options} /></div>
        ${problem && html`<${RlView.Problem} text=${problem} />`}
        ${both && answer.comparison && html`<${Comparison} comparison=${answer.comparison} />`}</section>`}`;
  };
  const Comparison = ({ comparison }) => html`<div class="table-frame"><table><thead><tr><th>task</th><th class="number">first</th><th class="number">second</th><th class="number">difference</th><th class="number">p</th><th class="number">better / worse</th><th class="number">prompts</th></tr></thead>
    <tbody>${Object.entries(comparison).map(([task, each]) => html`<tr><th scope="row">${task}</th><td class="number">${RlView.number(each.first)}</td><td class="number">${RlView.number(each.second)}</td><td class=${`number ${each.is_significant ? (each.difference.value > 0 ? 'up' : 'down') : ''}`}>${interval(each.difference)}</td><td class="number">${RlView.number(each.p_value)}</td><td class="number">${each.num_better} / ${each.num_worse}</td><td class="number">${each.num_prompts}</td></tr>`)}</tbody></table></div>
    <p class="muted">Colours mark differences that are significant at the confidence of the first evaluation.</p>`;

  // A server writes its numbers every ten seconds.
  const SILENT_S = 60;
  const count = (name, title) => ({ name, title, isNumber: true, value: (each) => each[name], cell: (each) => RlView.number(each[name]) });
  const TENANT = [
    { name: 'name', title: 'tenant', className: 'name', cell: (each) => each.name, value: (each) => each.name },
    count('models', 'models'), count('steps', 'steps'), count('trained_tokens', 'trained tokens'), count('sampled_tokens', 'sampled tokens'),
    count('requests', 'requests'), count('failed_requests', 'failed'), count('queued', 'waiting'),
    { name: 'oldest_queued_s', title: 'oldest waits', isNumber: true, value: (each) => each.oldest_queued_s, cell: (each) => (each.queued ? RlView.duration(each.oldest_queued_s) : '') },
    { name: 'waited_s', title: 'waited in all', isNumber: true, value: (each) => each.waited_s, cell: (each) => RlView.duration(each.waited_s) },
    { name: 'storage_bytes', title: 'checkpoints', isNumber: true, value: (each) => each.storage_bytes, cell: (each) => RlView.bytes(each.storage_bytes) },
  ];
  RlView.ServersPage = ({ query }) => {
    const live = RlView.useLive();
    const { answer, problem } = RlView.useAnswer('servers', {}, live.list);
    if (problem && !answer) return html`<${RlView.Problem} text=${problem} />`;
    if (!answer) return html`<${RlView.Empty}>Reading servers…</${RlView.Empty}>`;
    if (!answer.servers.length) return html`<section class="panel"><${RlView.Empty}>There are no servers in this folder. rl serve tinker makes them; pass their run directories to rl view.</${RlView.Empty}></section>`;
    const sort = query.get('sort') ?? '';
    return answer.servers.map((server) => html`<section class="panel" key=${server.id}>
      <h2>${server.id} <span class="muted">${RlView.shortModel(server.base_model)}</span> ${!server.problem && html`<span class=${Date.now() / 1000 - server.time > SILENT_S ? 'warn' : 'muted'}>numbers of ${RlView.age(server.time * 1000)}</span>`}</h2>
      ${server.problem ? html`<${RlView.Problem} text=${server.problem} />` : html`<${RlView.Table} label=${`tenants of ${server.id}`} columns=${TENANT} rows=${RlView.sorted(server.tenants, TENANT, sort)} sort=${sort} onSort=${(next) => RlView.setQuery({ sort: next })} keyOf=${(each) => each.name} />
        <${StepsOverTime} lines=${server.over_time} />`}</section>`);
  };
  const WIDTH = 720, HEIGHT = 120;
  const StepsOverTime = ({ lines }) => {
    if (lines.length < 2) return null;
    const first = lines[0].time, span = lines.at(-1).time - first || 1;
    const names = [...new Set(lines.flatMap((line) => Object.keys(line.steps)))].sort();
    const most = Math.max(1, ...lines.flatMap((line) => Object.values(line.steps)));
    const path = (name) => lines.filter((line) => name in line.steps).map((line, at) => `${at ? 'L' : 'M'}${(((line.time - first) / span) * WIDTH).toFixed(1)},${(HEIGHT - (line.steps[name] / most) * HEIGHT).toFixed(1)}`).join('');
    return html`<figure><svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`steps of ${names.join(', ')} over ${RlView.duration(span)}`} style=${{ width: '100%', height: `${HEIGHT}px` }} preserveAspectRatio="none">
      ${names.map((name, at) => html`<path d=${path(name)} fill="none" stroke=${RlView.COLORS[at % RlView.COLORS.length]} stroke-width="1.5" vector-effect="non-scaling-stroke"><title>${name}</title></path>`)}</svg>
      <ul class="legend">${names.map((name, at) => html`<li><i style=${{ background: RlView.COLORS[at % RlView.COLORS.length] }}></i>${name}</li>`)}</ul>
      <figcaption class="muted">optimizer steps, up to ${RlView.number(most)}, over ${RlView.duration(span)}</figcaption></figure>`;
  };
})();
