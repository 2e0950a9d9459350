/** A refusal of the coordinator, with the message it gave. */
export class ApiError extends Error {
  constructor(
    readonly code: string,
    message: string,
    readonly status: number,
  ) {
    super(message);
    this.name = "ApiError";
  }
}

export function withQuery(path: string, query: Record<string, string | number | null | undefined>): string {
  const params = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") params.set(key, String(value));
  }
  const text = params.toString();
  return text ? `${path}?${text}` : path;
}

export async function requestJson<T>(url: string, init?: RequestInit): Promise<T> {
  let response: Response;
  try {
    response = await fetch(url, { ...init, headers: { Accept: "application/json", ...init?.headers } });
  } catch {
    throw new ApiError("unreachable", "The coordinator cannot be reached. Is it running?", 0);
  }
  const text = await response.text();
  const body: unknown = text ? parseJson(text, response.status) : null;
  if (!response.ok) throw apiError(body, response.status);
  return body as T;
}

function parseJson(text: string, status: number): unknown {
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError(
      "not_json",
      `The response (${status}) is not JSON: is there a Strata coordinator at this address?`,
      status,
    );
  }
}

export function apiError(body: unknown, status: number): ApiError {
  const error = (body as { error?: { code?: string; message?: string } } | null)?.error;
  return new ApiError(error?.code ?? "failed", error?.message ?? `The coordinator answered ${status}.`, status);
}
