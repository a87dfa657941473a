'use strict';
// Small parts of pages: tables, fields, and text that nobody has checked.
(() => {
  const { html, useState, useEffect, useRef, useMemo } = RlView;

  // Characters that hide or reorder text, and control characters, are written as marks. Text is always a text node.
  const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\udb40][\udc00-\udc7f]/g;
  const NAMES = { 0x1b: 'ESC', 0x0d: 'CR', 0x00: 'NUL', 0x07: 'BEL', 0x08: 'BS', 0x200b: 'ZWSP', 0x200d: 'ZWJ', 0x200e: 'LRM', 0x200f: 'RLM', 0x202a: 'LRE', 0x202b: 'RLE', 0x202c: 'PDF', 0x202d: 'LRO', 0x202e: 'RLO', 0x2066: 'LRI', 0x2067: 'RLI', 0x2068: 'FSI', 0x2069: 'PDI', 0xfeff: 'BOM' };
  const marked = (text) => {
    const found = [];
    let end = 0;
    for (const match of text.matchAll(HIDDEN)) {
      if (match.index > end) found.push(text.slice(end, match.index));
      const code = match[0].codePointAt(0);
      const hex = code.toString(16).toUpperCase().padStart(4, '0');
      found.push(html`<span class="hidden-character" title=${`character U+${hex}`}>${NAMES[code] ?? `U+${hex}`}</span>`);
      end = match.index + match[0].length;
    }
    found.push(text.slice(end));
    return found;
  };
  const PART = 20000;
  RlView.Untrusted = ({ text, query = '' }) => {
    const whole = typeof text === 'string' ? text : text === null || text === undefined ? '' : JSON.stringify(text, null, 1);
    const [most, setMost] = useState(PART);
    const shown = whole.length > most ? whole.slice(0, most) : whole;
    const pieces = useMemo(() => (query ? highlighted(shown, query) : marked(shown)), [shown, query]);
    return html`<div class="untrusted" dir="auto">${pieces}</div>
      ${whole.length > most && html`<button class="quiet" onClick=${() => setMost(most * 5)}>show more (${(whole.length - most).toLocaleString('en')} characters left)</button>`}`;
  };
  const highlighted = (text, query) => {
    const found = [];
    const lower = text.toLowerCase();
    const wanted = query.toLowerCase();
    let at = 0;
    // a letter whose lower case is longer moves all that follow
    if (lower.length !== text.length) return marked(text);
    for (let next; (next = lower.indexOf(wanted, at)) >= 0 && found.length < 2000; at = next + wanted.length) {
      found.push(...marked(text.slice(at, next)), html`<mark>${marked(text.slice(next, next + wanted.length))}</mark>`);
    }
    found.push(...marked(text.slice(at)));
    return found;
  };
  RlView.marked = marked;

  RlView.Problem = ({ text, link = null }) => html`<p class="problem" role="alert">${text}${link && html` <a href=${link.href}>${link.text}</a>`}</p>`;
  // The chosen link of a strip that may be wider than the page; for `ref`, which is called before the link is on the page.
  RlView.intoView = (link) => link && requestAnimationFrame(() => link.scrollIntoView({ block: 'nearest', inline: 'center' }));
  RlView.Empty = ({ children }) => html`<p class="empty">${children}</p>`;
  RlView.Status = ({ status, reason = '' }) => html`<span class=${`status status-${status}`} title=${reason}>${status}</span>`;

  RlView.Field = ({ label, children, wide = false }) => html`<label class=${`field${wide ? ' wide' : ''}`}><span>${label}</span>${children}</label>`;
  // A field that changes the address when its text has settled.
  RlView.TextField = ({ label, name, query, placeholder = '', wide = false, type = 'text' }) => {
    const given = query.get(name) ?? '';
    const [text, setText] = useState(given);
    const timer = useRef(0);
    useEffect(() => { setText(given); }, [given]);
    const set = (value) => RlView.setQuery({ [name]: value, offset: '' });
    const change = (event) => {
      const value = event.currentTarget.value;
      setText(value);
      clearTimeout(timer.current);
      timer.current = setTimeout(() => set(value), 350);
    };
    const leave = () => { clearTimeout(timer.current); if (text !== given) set(text); };
    return html`<${RlView.Field} label=${label} wide=${wide}>
      <input type=${type} inputmode=${type === 'number' ? 'decimal' : undefined} step="any" value=${text} placeholder=${placeholder} onInput=${change} onBlur=${leave} onKeyDown=${(event) => event.key === 'Enter' && leave()} />
    </${RlView.Field}>`;
  };
  RlView.Choice = ({ label, name, query, options, fallback = '', all = null }) => {
    const value = query.get(name) ?? fallback;
    const pairs = options.map((option) => (Array.isArray(option) ? option : [option, option]));
    return html`<${RlView.Field} label=${label}>
      <select value=${value} onChange=${(event) => RlView.setQuery({ [name]: event.currentTarget.value === fallback ? '' : event.currentTarget.value, offset: '' })}>
        ${all !== null && html`<option value="">${all}</option>`}
        ${pairs.map(([each, text]) => html`<option value=${each} selected=${each === value}>${text}</option>`)}
        ${value && !pairs.some(([each]) => each === value) && html`<option value=${value} selected>${value}</option>`}
      </select>
    </${RlView.Field}>`;
  };
  RlView.Toggle = ({ label, name, query }) => html`<label class="toggle"><input type="checkbox" checked=${query.get(name) === '1'} onChange=${(event) => RlView.setQuery({ [name]: event.currentTarget.checked ? '1' : '' })} />${label}</label>`;

  // Columns: { name, title, cell, value (to sort by), isNumber, className }. The order is in the query.
  RlView.Table = ({ columns, rows, sort, onSort, keyOf, onOpen, isCurrent = () => false, label }) => {
    const body = useRef(null);
    const move = (event, index) => {
      const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
      if (event.key === 'Enter' && event.target === event.currentTarget) onOpen?.(rows[index]);
      else if (step && event.target === event.currentTarget) {
        event.preventDefault();
        body.current.children[index + step]?.focus();
      }
    };
    const name = sort.replace(/^-/, '');
    const order = (column) => {
      if (name !== column.name) return 'none';
      return sort.startsWith('-') ? 'descending' : 'ascending';
    };
    const next = (column) => (sort === column.name ? `-${column.name}` : sort === `-${column.name}` ? '' : column.isNumber ? (sort === `-${column.name}` ? '' : `-${column.name}`) : column.name);
    const cycle = (column) => (column.isNumber ? (sort === `-${column.name}` ? column.name : sort === column.name ? '' : `-${column.name}`) : next(column));
    return html`<div class="table-frame" tabindex="0" role="region" aria-label=${label}><table>
      <thead><tr>${columns.map((column) => html`<th scope="col" class=${column.isNumber ? 'number' : ''} aria-sort=${column.canSort === false ? undefined : order(column)}>
        ${column.canSort === false ? column.title : html`<button class="heading" onClick=${() => onSort(cycle(column))}>${column.title}<i aria-hidden="true">${{ ascending: '▴', descending: '▾', none: '' }[order(column)]}</i></button>`}
      </th>`)}</tr></thead>
      <tbody ref=${body}>${rows.map((row, index) => html`<tr key=${keyOf(row)} tabindex=${onOpen ? 0 : undefined} class=${isCurrent(row) ? 'current' : ''} onKeyDown=${(event) => move(event, index)} onClick=${(event) => !event.target.closest('a, button, input, label') && onOpen?.(row)}>
        ${columns.map((column) => html`<td class=${`${column.isNumber ? 'number' : ''} ${column.className ?? ''}`}>${column.cell(row)}</td>`)}
      </tr>`)}</tbody>
    </table></div>`;
  };
  RlView.sorted = (rows, columns, sort) => {
    const column = columns.find((each) => each.name === sort.replace(/^-/, ''));
    if (!column) return rows;
    const value = column.value ?? column.cell;
    const sign = sort.startsWith('-') ? -1 : 1;
    const missing = (each) => each === null || each === undefined || each === '';
    return [...rows].sort((one, other) => {
      const [a, b] = [value(one), value(other)];
      if (missing(a) || missing(b)) return Number(missing(a)) - Number(missing(b));
      return sign * (typeof a === 'number' && typeof b === 'number' ? a - b : String(a).localeCompare(String(b), 'en', { numeric: true }));
    });
  };
})();
