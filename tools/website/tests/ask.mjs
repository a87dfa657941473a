// The places that the search of the built site finds for each question: node ask.mjs HTML < questions.json
import { readFileSync, readdirSync } from "node:fs";

const html = process.argv[2];
const workers = `${html}/assets/javascripts/workers`;
const script = readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));
let answer;
globalThis.self = { postMessage: (message) => (answer = message) };
(0, eval)(readFileSync(`${workers}/${script}`, "utf8"));
const ask = (type, data) => {
  self.onmessage({ data: { type, data } });
  return answer.data;
};

const index = JSON.parse(readFileSync(`${html}/search.json`, "utf8"));
ask(0, index);
const questions = JSON.parse(readFileSync(0, "utf8"));
const found = questions.map((input) => ask(2, { input }).items.map((item) => index.items[item.id].location));
console.log(JSON.stringify(found));
