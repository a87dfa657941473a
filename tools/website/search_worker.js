// The site's search: ranks the sections of the pages by the words of a question. It speaks the protocol of the theme's
// own worker, whose place it takes: {type: 0, data: index} -> {type: 1}, {type: 2, data: {input, page}} -> {type: 3, data}.
// The theme's worker finds only sections that have every word, so it finds nothing for most questions.
(() => {
  const SIZE = 10;
  const FIELDS = { title: 5, path: 2, text: 1 };
  // BM25: how soon more of the same word counts less, and how much long sections are penalised
  const SATURATION = 1.2;
  const LENGTH = 0.5;
  const EXACT_TITLE = 4;
  // how much more a section counts whose title, or the title of its page, has all words of the question
  const IN_TITLE = 2;
  // how much a word counts that only other sections of the page have
  const ELSEWHERE = 0.5;
  // how much more a section of a page counts that has the words often, and from how many occurrences on
  const OF_PAGE = 1;
  const OFTEN = 5;
  const PARTIAL = { part: 0.5, synonym: 0.8, prefix: 0.6, fuzzy: 0.5 };
  // pages that explain come before pages that list; the first prefix that fits decides
  const KINDS = [
    ["troubleshooting", 1.15], ["concepts/", 0.9], ["reference/config/", 0.3], ["reference/cli/", 0.5], ["reference/python/", 0.2],
    ["reference/errors", 0.3], ["reference/metrics", 0.4], ["reference/", 0.4], ["recipes/index", 0.5], ["recipes/", 0.3],
    ["benchmarks/", 0.3], ["packages/", 0.4], ["architecture", 0.3], ["api", 0.3], ["pages", 0.2], ["AGENTS", 0.2], ["SECURITY", 0.5],
    ["CONTRIBUTING", 0.3], ["CODE_OF_CONDUCT", 0.3], ["metrics", 0.8], ["messages", 0.8], ["coming-from", 0.6], ["index.html", 0.7], ["", 1],
  ]; // prettier-ignore
  const CHANGELOG = 0.25;
  // a question for a meaning is answered by a page that explains
  const ASKS_FOR_A_MEANING = /^\s*what (is|are|does)\b/i;
  const EXPLAINS = 1.5;
  const SECTIONS_OF_A_PAGE = 2;
  const FURTHER_SECTION = 0.5;
  const COMMON = new Set(
    ("a about after all already also always am an and any are as at be because been before but by can cannot could did difference do does doesn don error " +
      "explain explained for from get give given go had has have how i if in into is isn it its just like keep many me more much my need never no not of on " +
      "one only or our own pass possible rl set should so some still t than that the their them then there these they this to too up us use " +
      "used using vs versus want was we what when where which while who why will with won would you your").split(" "),
  );
  // words of readers, and the words of these pages for them
  const SYNONYMS = {
    accum: "accumulation", adapter: "lora", architecture: "family", async: "asynchronous", batching: "packing", beta: "kl", benchmark: "evaluate",
    clipped: "truncated", colab: "notebook", completion: "rollout", constant: "flat", container: "image", cost: "memory gpu",
    crash: "fail died", custom: "own", cut: "truncated", dashboard: "view monitoring", dataset: "data", ddp: "data parallel gpu",
    deadlock: "hang", deepspeed: "fsdp shard", deterministic: "bit-identical", differ: "mismatch",
    directory: "folder", disagree: "mismatch", diverge: "mismatch nan", docker: "image", env: "environment", explode: "grow nan",
    export: "convert hf", file: "folder", finetune: "sft", finetuning: "sft", frozen: "freeze hang", grad: "gradient", grader: "reward", high: "grow",
    huggingface: "hub hf transformers", hyperparameter: "key", increase: "grow rise", inference: "generation", install: "installing", internet: "network",
    judge: "reward", jupyter: "notebook", killed: "preemption died", label: "answer", langchain: "framework", langgraph: "framework",
    laptop: "cpu", loading: "load", mac: "laptop cpu", macbook: "laptop cpu", moe: "mixture expert", multi: "several",
    multinode: "machine cluster", multiple: "several multi", node: "machine", offline: "network", offpolicy: "staleness asynchronous",
    oom: "memory", opd: "distillation", opponent: "self-play", plateau: "flat", preempted: "preemption", prompt: "row",
    qlora: "lora bit", ratio: "mismatch", reproducibility: "seed bit-identical", reproducible: "seed bit-identical", requeue: "continue",
    restart: "resume continue", sample: "rollout", save: "checkpoint", see: "read look view", sglang: "vllm", single: "one",
    snapshot: "checkpoint", speed: "slow", stagnate: "flat", stale: "staleness age", stuck: "hang", sweep: "ablation", swe: "coding repository",
    throughput: "slow tokens_per_second", trajectory: "rollout", truth: "answer", tune: "sft", unstable: "collapse explode",
    unsupported: "supported refused", upload: "push", verification: "answer grader", verifier: "reward", verify: "answer check",
    vl: "vision", vlm: "vision", vram: "gpu memory gb", wandb: "tracker", worker: "process", zero: "0",
  }; // prettier-ignore

  const WORD = /<[^>]*>|&\w+;|\d+(?=gi?b\b)|[\p{L}\p{N}_]+/giu;
  let sections = [];
  let postings = new Map(); // stem -> Map(section -> weight of its occurrences)
  let vocabulary = [];
  let meanLength = 1;

  function stem(word) {
    if (/[_\d]/.test(word)) return word;
    let text = word.replace(/ies$/, "y");
    if (text.length > 5) text = text.replace(/ing$/, "");
    if (text.length > 4) text = text.replace(/ed$/, "");
    if (text.length > 3) text = text.replace(/([^s])s$/, "$1");
    return text.length > 3 ? text.replace(/(.)\1$/, "$1").replace(/e$/, "") : text;
  }

  // calls back with the stem, the weight and the place of each word that a reader sees
  function words(text, call) {
    for (const found of text.matchAll(WORD)) {
      const word = found[0].toLowerCase();
      if (word[0] === "<" || word[0] === "&") continue;
      call(stem(word), 1, found.index, word.length);
      const parts = word.split("_").filter(Boolean);
      if (parts.length > 1) for (const part of parts) call(stem(part), PARTIAL.part, found.index, word.length);
    }
  }

  const plain = (text) => text.replace(/<[^>]*>/g, "").replace(/[^\w.]+/g, " ").trim().toLowerCase(); // prettier-ignore

  function kind(location) {
    return location.includes("CHANGELOG") ? CHANGELOG : KINDS.find(([start]) => location.startsWith(start))[1];
  }

  function read(index) {
    postings = new Map();
    sections = index.items.map((item, id) => {
      let length = 0;
      const titled = new Map();
      words(`${item.title} ${item.path.at(-1) ?? ""}`, (term, weight) => titled.set(term, Math.max(weight, titled.get(term) ?? 0)));
      for (const field of Object.keys(FIELDS)) {
        words(field === "path" ? item.path.join(" ") : item[field], (term, weight) => {
          length += field === "text";
          let found = postings.get(term);
          if (!found) postings.set(term, (found = new Map()));
          found.set(id, (found.get(id) ?? 0) + weight * FIELDS[field]);
        });
      }
      return { ...item, length, titled, kind: kind(item.location), page: item.location.split("#")[0], name: plain(item.title) };
    });
    vocabulary = [...postings.keys()];
    meanLength = sections.reduce((sum, each) => sum + each.length, 1) / Math.max(1, sections.length);
  }

  function isNear(one, other) {
    const limit = one.length > 7 ? 2 : 1;
    if (Math.abs(one.length - other.length) > limit || one[0] !== other[0]) return false;
    const rows = [[...other, ""].map((_, place) => place)];
    for (let i = 1; i <= one.length; i++) {
      rows[i] = [i];
      for (let j = 1; j <= other.length; j++) {
        const changed = rows[i - 1][j - 1] + (one[i - 1] !== other[j - 1]);
        rows[i][j] = Math.min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, changed);
        if (i > 1 && j > 1 && one[i - 1] === other[j - 2] && one[i - 2] === other[j - 1])
          rows[i][j] = Math.min(rows[i][j], rows[i - 2][j - 2] + 1);
      }
    }
    return rows[one.length][other.length] <= limit;
  }

  // terms of the index that a word of the question may mean, with weights
  function meanings(word, isLast) {
    const term = stem(word);
    const found = new Map();
    const add = (each, weight) => postings.has(each) && found.set(each, Math.max(weight, found.get(each) ?? 0));
    for (const name of [word, term]) {
      const synonyms = Object.entries(SYNONYMS).find(([key]) => key === name || stem(key) === name)?.[1];
      for (const other of synonyms?.split(" ") ?? []) words(other, (each) => add(each, PARTIAL.synonym));
    }
    if (isLast && word.length > 1)
      for (const each of vocabulary) if (each.startsWith(word) && each !== term) add(each, PARTIAL.prefix);
    add(term, 1);
    if (!found.size && term.length > 3)
      for (const each of vocabulary) if (each.startsWith(term)) add(each, PARTIAL.prefix);
    if (!found.size && term.length > 3) for (const each of vocabulary) if (isNear(term, each)) add(each, PARTIAL.fuzzy);
    return found;
  }

  function asked(input) {
    const all = [];
    for (const found of input.matchAll(WORD)) all.push(found[0].toLowerCase());
    const rare = all.filter((word) => !COMMON.has(word));
    const kept = rare.length ? rare : all;
    const isTyped = /[\p{L}\p{N}_]$/u.test(input);
    return [...new Set(kept)].map((word, place) => meanings(word, isTyped && place === kept.length - 1));
  }

  function rank(input) {
    const terms = asked(input);
    const scores = new Map();
    const onPage = new Map();
    let mass = 0;
    for (const term of terms) {
      const best = new Map();
      const occurrences = new Set();
      for (const [each, weight] of term)
        for (const [id, count] of postings.get(each)) {
          occurrences.add(id);
          const limit = SATURATION * (1 - LENGTH + (LENGTH * sections[id].length) / meanLength);
          best.set(id, Math.max(best.get(id) ?? 0, (weight * count * (SATURATION + 1)) / (count + limit)));
        }
      const rarity = Math.log(1 + (sections.length + 0.5) / (occurrences.size + 0.5));
      mass += rarity;
      const pages = new Map();
      for (const [id, score] of best) pages.set(sections[id].page, (pages.get(sections[id].page) ?? 0) + score);
      for (const [page, score] of pages) {
        const total = onPage.get(page) ?? { mass: 0, score: 0 };
        onPage.set(page, { mass: total.mass + rarity, score: total.score + (rarity * score) / (score + OFTEN) });
      }
      for (const [id, score] of best) {
        const total = scores.get(id) ?? { score: 0, mass: 0, titled: 0 };
        const inTitle = Math.max(0, ...[...term].map(([each, weight]) => weight * (sections[id].titled.get(each) ?? 0)));
        scores.set(id, { score: total.score + rarity * score, mass: total.mass + rarity, titled: total.titled + rarity * inTitle });
      }
    }
    const whole = plain(input);
    const asksForMeaning = ASKS_FOR_A_MEANING.test(input);
    const ranked = [...scores].map(([id, found]) => {
      const { name, kind, location, page } = sections[id];
      const ofPage = onPage.get(page);
      const covered = (found.mass + ELSEWHERE * (ofPage.mass - found.mass)) / mass;
      const isKey = /[_.]/.test(input) || !location.startsWith("reference/");
      const isExact = isKey && (name === whole || name.endsWith(`.${whole}`) || location.endsWith(`#${input.trim()}`));
      const titled = 1 + IN_TITLE * (found.titled / mass) ** 2;
      const explains = asksForMeaning && location.startsWith("concepts/") ? EXPLAINS : 1;
      return { id, score: found.score * covered ** 2 * titled * (1 + OF_PAGE * (ofPage.score / mass)) * kind * explains * (isExact ? EXACT_TITLE : 1) };
    });
    ranked.sort((one, other) => other.score - one.score || one.id - other.id);
    const seen = new Map();
    for (const each of ranked) {
      const { page } = sections[each.id];
      seen.set(page, (seen.get(page) ?? 0) + 1);
      if (seen.get(page) > SECTIONS_OF_A_PAGE) each.score *= FURTHER_SECTION;
    }
    ranked.sort((one, other) => other.score - one.score || one.id - other.id);
    return { terms, ids: ranked.map((each) => each.id) };
  }

  function highlighted(text, sought) {
    const ranges = [];
    words(text, (term, _, start, length) => {
      if (sought.has(term) && ranges.at(-1)?.start !== start) ranges.push({ start, end: start + length, value: 0 });
    });
    return { highlight: { ranges } };
  }

  function respond({ input, page }) {
    const { terms, ids } = rank(input);
    const from = page?.from ?? 0;
    const sought = new Set(terms.flatMap((term) => [...term.keys()]));
    const items = ids.slice(from, from + SIZE).map((id) => {
      const { title, path, text } = sections[id];
      const fields = Object.entries({ title, path: path.join(""), text });
      return { id, matches: fields.map(([field, each]) => ({ field, value: highlighted(each, sought) })) };
    });
    const place = (start) => ({ id: 0, size: SIZE, from: start });
    const pagination = {
      total: ids.length,
      prev: from >= SIZE ? place(from - SIZE) : undefined,
      next: from + SIZE < ids.length ? place(from + SIZE) : undefined,
    };
    return { items, pagination, aggregations: [] };
  }

  self.onmessage = ({ data: message }) => {
    if (message.type === 0) {
      read(message.data);
      self.postMessage({ type: 1 });
    } else if (message.type === 2) {
      self.postMessage({ type: 3, data: respond(message.data) });
    }
  };
})();
