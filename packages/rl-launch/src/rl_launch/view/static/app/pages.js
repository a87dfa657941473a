'use strict';
// Evaluations and their comparison.
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
})();
