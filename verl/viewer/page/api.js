// Questions to the server, and the links of the page. A link holds all of a view: its name and its filters.

export class ServerError extends Error {
  constructor(message, fix) {
    super(message);
    this.fix = fix;
  }
}

const GONE = "Start `verl view RUN` once more and open the link that it prints.";
const LOCKED = "Open the link that `verl view RUN` printed: it has the secret of this server.";

function address(path, query) {
  const text = new URLSearchParams(pairs(query)).toString();
  return `/api/${path}${text ? "?" + text : ""}`;
}

/** [[name, value]] of an object; lists give one pair per value, empty values none. */
function pairs(query) {
  return Object.entries(query)
    .flatMap(([name, value]) => (Array.isArray(value) ? value : [value]).map((item) => [name, item]))
    .filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false);
}

/** The answer, or null where the server says that nothing changed. */
export async function get(path, query, signal = undefined) {
  let response;
  try {
    response = await fetch(address(path, query), { signal, headers: { Accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server of this page does not answer.", GONE);
  }
  if (response.status === 204) return null;
  const answer = await response.json().catch((error) => {
    if (error.name === "AbortError") throw error;
    return { error: { message: `The server answered ${response.status} without JSON.`, fix: GONE } };
  });
  if (response.status === 401) throw new ServerError("The server does not let this page in.", LOCKED);
  if (!response.ok) throw new ServerError(answer.error?.message ?? response.statusText, answer.error?.fix);
  return answer;
}

/** Whether the server still reads files for this answer: the same question gets more of them. */
export function isUnfinished(answer) {
  return [answer?.indexed, answer?.searched].some((part) => part && part.files < part.of);
}

/** Asks the same again and again: gives null while nothing changed. */
export function feed(path, query, signal) {
  let changed = null;
  return async () => {
    const answer = await get(path, { ...query, changed }, signal);
    if (answer) changed = isUnfinished(answer) ? null : (answer.changed ?? null);
    return answer;
  };
}

/** The file of a question, of all its pages. */
export function exportLink(what, query, format) {
  return address("export", { what, format, ...query, page: null, size: null });
}

/** The link of a view. */
export function link(view, query = {}) {
  const text = new URLSearchParams(pairs(query)).toString();
  return `#/${view}${text ? "?" + text : ""}`;
}

/** View and query of a link. */
export function parse(hash) {
  const [view, text = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { view: view || "overview", query: new URLSearchParams(text) };
}

/** The values of a link's `query` with some of them replaced; null takes one out. */
export function changed(query, values) {
  const names = [...new Set(query.keys())];
  return { ...Object.fromEntries(names.map((name) => [name, query.getAll(name)])), ...values };
}
