// What the plugin's routes answer, fetched when it is needed. Plans are kept: many rounds share one.

const KEPT_PLANS = 32;
const plans = new Map();

async function get(route, query = {}) {
  const response = await fetch(`./${route}?${new URLSearchParams(query)}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

// A table of rows as a list of objects.
function records({ columns, rows }) {
  return rows.map((row) => Object.fromEntries(columns.map((column, at) => [column, row[at]])));
}

export const fetchRuns = () => get("runs");

export async function fetchRun(name) {
  const run = await get("run", { run: name });
  plans.clear();
  return { ...run, name, rounds: records(run.rounds) };
}

export async function fetchPlan(run, id) {
  const key = JSON.stringify([run, id]);
  if (!plans.has(key)) {
    const plan = await get("plan", { run, plan: id });
    plans.set(key, { ...plan, tasks: records(plan.tasks), waits: records(plan.waits) });
    if (plans.size > KEPT_PLANS) plans.delete(plans.keys().next().value);
  }
  return plans.get(key);
}

// The round of that index with its plan.
export async function fetchRound(run, index) {
  const round = await get("round", { run, round: index });
  return { ...round, waits: records(round.waits), plan: await fetchPlan(run, round.plan) };
}
